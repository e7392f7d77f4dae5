"""Token-reduction policies, one file each."""
