"""Token-reduction policies, one file each.

To add a policy, write a module with a subclass of `Policy` (see `base.py`), export it in
`bmfa/merging/__init__.py`, add its command-line name to `_PARSERS` in `names.py`, and describe it in
`bmfa/evidence/methods.py` (title, parameter, mark in figures), from which `bmfa methods` prints.
"""
