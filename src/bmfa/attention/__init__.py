"""Screened attention: the public function, the choice of a backend, the forms and their kernels."""
