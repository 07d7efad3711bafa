import { type FlatIndex, FlatIndexBuilder, findFlat, ZEROED_TAG } from "./lsmt/flat-index.ts";

/**
 * The index of a stack after the `count` layers from number `first` on have been replaced by one whose own index
 * is `merged` (tagged `first`): what pointed into them points into that one, layers above count from `first + 1`.
 * Throws when the layer does not have what it stands for.
 */
export function remapTags(base: FlatIndex, first: number, count: number, merged: FlatIndex): FlatIndex {
  const out = new FlatIndexBuilder(base.count);
  for (let i = 0; i < base.count; i++) {
    const tag = base.tags[i]!;
    const layer = tag & ~ZEROED_TAG;
    const offset = base.offsets[i]!;
    const length = base.lengths[i]!;
    const zeroed = tag >= ZEROED_TAG;
    if (layer < first) {
      out.add(offset, length, base.moffsets[i]!, tag);
    } else if (layer >= first + count) {
      out.add(offset, length, base.moffsets[i]!, tag - count + 1);
    } else {
      let position = offset;
      for (let at = findFlat(merged, offset); position < offset + length; at++) {
        const start = at < merged.count ? merged.offsets[at]! : Number.POSITIVE_INFINITY;
        const mergedZeroed = (merged.tags[at] ?? 0) >= ZEROED_TAG;
        if (start > position || mergedZeroed !== zeroed) {
          throw new Error(`the merged layer differs from what it stands for at sector ${position}`);
        }
        const to = Math.min(offset + length, start + merged.lengths[at]!);
        const moffset = merged.moffsets[at]!;
        out.add(position, to - position, zeroed ? moffset : moffset + (position - start), merged.tags[at]!);
        position = to;
      }
    }
  }
  return out.finish();
}
