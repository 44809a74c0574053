"""Python reads this first, where the folder is on its path: the ranks in STANDIN_RANKS train on the stand-in."""

import os

if os.environ.get("JAXCHE_PROCESS_ID") in os.environ.get("STANDIN_RANKS", "").split(","):
    os.environ["JAX_PLATFORMS"] = "standin"
