"""``python -m deepinfer`` is the command ``deepinfer``."""

from deepinfer.cli import main

if __name__ == "__main__":
    main()
