"""``python -m jaxche``."""

from jaxche.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
