"""What every model is asked to continue, and for how long."""

PROMPTS = (
    "The experts of a layer",
    "def balance(load: list[int]) -> int:\n",
    "Es war einmal ein Netz, das",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "A pipeline is as fast as its slowest stage; every other one waits for it, and so",
    "ÆØÅ æøå: naïve façade",
)
"""Of several lengths and kinds, so that experts are loaded unevenly."""
TOKENS = 24
"""That are generated for each prompt."""
