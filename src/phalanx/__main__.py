"""`python -m phalanx` is the `phalanx` command, for launchers that start modules."""

from phalanx.cli.main import main

if __name__ == "__main__":
    main()
