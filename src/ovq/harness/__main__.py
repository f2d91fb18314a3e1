"""lm-eval's own command line, every option of it: ``python -m ovq.harness --model hf ...``."""

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
