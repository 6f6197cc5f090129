"""Commands of ``fedjax-dg``, one file each."""
