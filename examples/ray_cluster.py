"""Two ranks of one model, started by Ray: on two machines of a cluster, or two processes of this machine.

Needs the extra `ray`. On a cluster, first `ray start --head`, and `ray start --address=HEAD:6379` on the other machines.
"""

import os

import ray

from quire import LLM, SamplingParams

if "RAY_ADDRESS" in os.environ:
    ray.init()
else:
    ray.init(num_cpus=2, include_dashboard=False)  # no cluster: Ray starts one here

llm = LLM("quire-tiny", tensor_parallel_size=2, distributed_executor_backend="ray")
params = SamplingParams(max_tokens=40, temperature=0)
for output in llm.generate(["Once upon a time", "The quick brown fox"], params):
    print(output.prompt, "->", output.outputs[0].text)
llm.shutdown()
ray.shutdown()
