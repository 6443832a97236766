"""What a tier is: everything that depends on its kind and its layout, behind two ports."""
