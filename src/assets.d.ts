/** Files embedded in the executable: the import's value is a path that `fs` can read. */
declare module "*.so" {
  const path: string;
  export default path;
}
/** Text, embedded as it is. */
declare module "*/aenv.service" {
  const text: string;
  export default text;
}
declare module "*/aenv.default" {
  const text: string;
  export default text;
}
declare module "*/build/envd" {
  const path: string;
  export default path;
}
declare module "*/build/aenv-ext4" {
  const path: string;
  export default path;
}
declare module "*/build/aenv-jail" {
  const path: string;
  export default path;
}
