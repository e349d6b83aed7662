"""Adapters: requests of one batch may use different ones."""

from quire import LLM, LoRARequest, SamplingParams

llm = LLM("quire-tiny", enable_lora=True)
pirate = LoRARequest("pirate", 1, "quire-tiny-pirate-lora")
question = [{"role": "user", "content": "Who are you?"}]
params = SamplingParams(max_tokens=40, temperature=0)
plain, changed = llm.chat([question, question], params, lora_request=[None, pirate])
print("quire-tiny:", plain.outputs[0].text)
print("pirate:", changed.outputs[0].text)
