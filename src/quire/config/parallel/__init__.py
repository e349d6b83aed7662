"""How many ranks, engines and machines serve a model: the options, and the combinations that are refused."""
