"""Model architectures, and how a checkpoint fills them. hf_config and registry do not import torch."""
