"""Retrieval: the document that is nearest to the question goes into the prompt."""

import numpy as np

from quire import LLM, SamplingParams

documents = [
    "Tom likes apples.",
    "Anna lives in Oslo.",
    "The red ball is in the kitchen.",
    "The dog of Ben is called Max.",
]
question = "Where does Anna live?"

embedder = LLM("quire-tiny-embed", kv_cache_memory_bytes="16M")
vectors = np.array([output.outputs.embedding for output in embedder.embed([*documents, question])])
nearest = (vectors[:-1] @ vectors[-1]).argsort()[::-1][:2]
found = "\n".join(documents[place] for place in nearest)
print(found)

llm = LLM("quire-tiny", kv_cache_memory_bytes="64M")
prompt = [{"role": "user", "content": f"Read this text.\n\n{found}\n\n{question}"}]
print("answer:", llm.chat(prompt, SamplingParams(max_tokens=40, temperature=0))[0].outputs[0].text)
