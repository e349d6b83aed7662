"""Write a Whisper checkpoint in CTranslate2's format: `to_ctranslate2.py '{"source": FOLDER, "model": FOLDER}'`.

The Python of the environment `faster-whisper` (install.py) runs it. The weights stay in 32 bits: CTranslate2 makes others while it loads.
"""

from __future__ import annotations

import json
import sys

from ctranslate2.converters import TransformersConverter

asked = json.loads(sys.argv[1])
TransformersConverter(asked["source"]).convert(asked["model"], force=True)
