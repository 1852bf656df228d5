"""The ``nestforge`` command, from its first import on: Ctrl-C at any moment is one line and exit code 130."""

import os


def main() -> None:
    """Runs the command line of this process, and ends it."""
    try:
        from .tools.interruption import ignore, listen, was_interrupted

        listen()
        try:
            from .tools.cli import main as command

            command()
        except Exception:  # an import that was interrupted may fail in any way
            if not was_interrupted():
                raise
            raise KeyboardInterrupt from None
        finally:
            ignore()  # the command has ended, and Python clears up
    except KeyboardInterrupt:
        os.write(2, b"nestforge: interrupted\n")
        os._exit(130)


if __name__ == "__main__":
    main()
