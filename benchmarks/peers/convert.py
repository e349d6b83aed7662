"""Convert a checkpoint to OpenVINO's format: `convert.py CHECKPOINT FOLDER bf16|int8|int4`.

It uses OpenVINO's weight compression as its documentation recommends: int8 with a scale and a zero point per output;
int4, symmetric, with a scale per 128 weights. The Python of the environment `convert` (install.py) runs it.
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

WEIGHTS = {
    "bf16": None,
    "int8": {"bits": 8, "sym": False},
    "int4": {"bits": 4, "sym": True, "group_size": 128, "ratio": 1.0},
}

source, folder, weights = sys.argv[1:]
chosen = WEIGHTS[weights]
model = OVModelForCausalLM.from_pretrained(
    source, export=True, compile=False, load_in_8bit=False,
    quantization_config=None if chosen is None else OVWeightQuantizationConfig(**chosen),
)  # fmt: skip
model.save_pretrained(folder)
