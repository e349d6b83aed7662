"""Objects of a class from text: the answer always has the form of its schema."""

from typing import Literal

from pydantic import BaseModel, Field

from quire import LLM, SamplingParams, StructuredOutputsParams


class Animal(BaseModel):
    name: str = Field(max_length=20)
    kind: Literal["fox", "bear", "owl", "frog"]
    age: int


llm = LLM("quire-tiny")
params = SamplingParams(
    max_tokens=60, temperature=0, structured_outputs=StructuredOutputsParams(json=Animal)
)
texts = ["A fox named Gina is 3 years old.", "Bruno the bear is 7 years old."]
outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
for output in outputs:
    print(Animal.model_validate_json(output.outputs[0].text))
