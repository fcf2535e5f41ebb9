"""``python -m hf_xai.cli``, for where the script ``hf-xai`` is not on the path."""

from hf_xai.cli import main

main()
