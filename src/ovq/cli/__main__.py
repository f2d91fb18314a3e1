"""``python -m ovq.cli``, where no script is installed."""

from ovq.cli import run

if __name__ == "__main__":
    run()
