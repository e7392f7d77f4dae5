"""Screened attention: the public function, its backends and its kernels."""
