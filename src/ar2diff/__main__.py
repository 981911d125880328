"""`python -m ar2diff`."""

from ar2diff.cli import main

if __name__ == "__main__":
    main()
