"""`python -m deephoyer` is the command `deephoyer`."""

from deephoyer.cli import main

main()
