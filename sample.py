"""Draws images from a checkpoint: `python sample.py --checkpoint assets/fashion32 --label sneaker --num 8`.

`python sample.py --help` lists every option.
"""

from visgen.sample import main

if __name__ == "__main__":
    main()
