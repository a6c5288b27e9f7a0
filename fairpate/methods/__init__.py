"""The methods: a file per family of papers, from equations to class; ``base`` says what a method is."""
