"""Registration of expert weights: which tensors they are, and which memory they occupy."""
