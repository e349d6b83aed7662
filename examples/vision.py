"""A question about a picture. Needs Pillow: python examples/vision.py [MODEL] [PICTURE]"""

import sys

from PIL import Image, ImageDraw

from quire import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "quire-tiny"
if len(sys.argv) > 2:
    picture = Image.open(sys.argv[2])
else:  # a red ball
    picture = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(picture).ellipse((40, 40, 184, 184), fill="red")

llm = LLM(model, max_model_len="auto")
question = [
    {
        "role": "user",
        "content": [
            {"type": "image_pil", "image_pil": picture},
            {"type": "text", "text": "What is in this picture?"},
        ],
    }
]
answer = llm.chat(question, SamplingParams(max_tokens=60, temperature=0))[0]
print(f"{len(answer.prompt_token_ids)} tokens of prompt, with the picture")
print("answer:", answer.outputs[0].text)
