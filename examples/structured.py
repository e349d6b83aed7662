"""Objects of a class from text: the answer always has the form of its schema."""

from typing import Literal

from pydantic import BaseModel, Field

from quire import LLM, SamplingParams, StructuredOutputsParams


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int
    city: Literal["Madrid", "Oslo", "Paris", "Rome"]


llm = LLM("quire-tiny")
params = SamplingParams(
    max_tokens=60, temperature=0, structured_outputs=StructuredOutputsParams(json=Person)
)
texts = ["Mira Stone is 34 years old and lives in Oslo.", "Ben Hill, 41, comes from Madrid."]
outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
for output in outputs:
    print(Person.model_validate_json(output.outputs[0].text))
