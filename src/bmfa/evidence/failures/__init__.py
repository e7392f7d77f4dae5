"""Where each rule fails: fields and pictures on which another rule is clearly better."""
