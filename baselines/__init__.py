"""Methods of other papers, to compare with. They use what any package of methods may use
(`docs/writing-a-method.md`): `Method` and an entry point each. Nothing in kvferry imports them."""
