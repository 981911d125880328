"""Who may attend to whom, and how it is computed: one rule, several implementations."""
