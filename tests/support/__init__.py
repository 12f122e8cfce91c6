"""What tests share: dense oracles, drawn cases, ranks, browsers and planted bugs."""
