"""`python -m polyfed.cli`, the same as `polyfed`."""

from polyfed.cli import main

if __name__ == "__main__":
    main()
