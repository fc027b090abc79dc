"""What passages are worth to one reader, fitted from its answers marked right or wrong."""
