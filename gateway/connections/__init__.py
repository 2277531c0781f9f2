"""How answers reach clients: large ones hold up no others, and none that is cut short ends as if it were whole."""
