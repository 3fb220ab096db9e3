"""Trains a tokenizer, a generator or a student: `python train.py configs/debug/vq.yaml [--loop.steps 100 ...]`.

On several GPUs: `accelerate launch --config_file configs/accelerate/gpu8.yaml train.py CONFIG`. With `--dry-run` it
builds every net without memory, reads no weights and prints {net: parameters} as JSON. `--help` lists every key.
"""

from visgen.train.main import main

if __name__ == "__main__":
    main()
