echo frozen
