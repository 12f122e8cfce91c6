"""How a pattern is computed: the options, what each costs, the choice; and its BlockMask."""
