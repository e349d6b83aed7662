"""The endpoints of Anthropic's Messages interface."""
