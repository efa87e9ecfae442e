"""What a conductor has seen lately, kept for operators. No decision looks at any of it."""
