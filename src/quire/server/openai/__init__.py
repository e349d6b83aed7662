"""The endpoints of OpenAI's HTTP interface, and what vLLM adds to them."""
