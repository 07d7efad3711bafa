/** Files embedded in the executable: the import's value is a path that `fs` can read. */
declare module "*.so" {
  const path: string;
  export default path;
}
declare module "*/build/envd" {
  const path: string;
  export default path;
}
declare module "*/build/aenv-ext4" {
  const path: string;
  export default path;
}
