"""Many prompts at once: the engine forms the batches."""

from quire import LLM, SamplingParams

animals = ["fox", "bear", "owl", "frog"]
llm = LLM("quire-tiny")
conversations = [
    [{"role": "user", "content": f"Tell me a story about a {animal}."}] for animal in animals
]
outputs = llm.chat(conversations, SamplingParams(max_tokens=120, temperature=0, seed=1))
for animal, output in zip(animals, outputs, strict=True):
    print(f"{animal}: {output.outputs[0].text}\n")
