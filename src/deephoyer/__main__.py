"""`python -m deephoyer` is the command `deephoyer`."""

from deephoyer.lab.cli import main

main()
