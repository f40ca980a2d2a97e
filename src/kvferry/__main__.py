"""`python -m kvferry`: the `kvferry` command."""

from kvferry.services.launcher.cli import main

if __name__ == "__main__":
    main()
