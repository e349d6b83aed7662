"""The draw: by its definition, distributed as it should be, and favouring no token, seed or position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from quire.worker.sample.draw import draw, draw_among, gumbel, keys, seed_words
