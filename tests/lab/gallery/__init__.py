"""The fault gallery's programs, one a public fault, each with its nearest healthy neighbour in it: the same lines, but
for those that depend on ``bench.healthy``. ``tests/faults/gallery.py`` says what to expect of them."""
