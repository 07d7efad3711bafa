type CamelName<Name extends string> = Name extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelName<Tail>>}`
  : Name;

/** The same value with camelCase keys, tables only: lists stay as they are. */
export type Camel<Value> = Value extends readonly unknown[]
  ? Readonly<Value>
  : Value extends object
    ? { readonly [Name in keyof Value as Name extends string ? CamelName<Name> : Name]: Camel<Value[Name]> }
    : Value;

export function camelName(name: string): string {
  return name.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
}

/** `home_path` becomes `homePath`, in every table. */
export function toCamel<Value>(value: Value): Camel<Value> {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return value as Camel<Value>;
  return Object.fromEntries(
    Object.entries(value).map(([name, inner]) => [camelName(name), toCamel(inner as unknown)]),
  ) as Camel<Value>;
}
