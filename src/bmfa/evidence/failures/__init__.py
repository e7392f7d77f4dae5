"""Where each rule fails: fields and images on which another rule is clearly better."""
