#include "procmem.h"

#include <errno.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096u
/* Largest whole number below which doubles have no gaps. */
#define MAX_EXACT 9007199254740992.0

/*
 * PAGEMAP_SCAN of Linux 6.7, from the kernel's Documentation/admin-guide/mm/pagemap.rst and uapi linux/fs.h; the
 * names are ours because older kernel headers have none.
 */
struct scan_region {
  uint64_t start;
  uint64_t end;
  uint64_t categories;
};

struct scan_arg {
  uint64_t size;
  uint64_t flags;
  uint64_t start;
  uint64_t end;
  uint64_t walk_end;
  uint64_t vec;
  uint64_t vec_len;
  uint64_t max_pages;
  uint64_t category_inverted;
  uint64_t category_mask;
  uint64_t category_anyof_mask;
  uint64_t return_mask;
};

#define SCAN_IOCTL _IOWR('f', 16, struct scan_arg)
#define CATEGORY_FILE (1u << 2)
#define CATEGORY_PRESENT (1u << 3)
#define CATEGORY_SWAPPED (1u << 4)

/* Entry of /proc/PID/pagemap. */
#define ENTRY_PRESENT (1ull << 63)
#define ENTRY_SWAPPED (1ull << 62)
#define ENTRY_FILE (1ull << 61)

/* Appends [start, end), merged with the last pair when they touch. Returns 0 when there is no room. */
static int push(double *ranges, uint32_t *count, uint32_t max, uint64_t start, uint64_t end) {
  if (*count > 0 && ranges[*count * 2 - 1] == (double)start) {
    ranges[*count * 2 - 1] = (double)end;
    return 1;
  }
  if (*count == max) return 0;
  ranges[*count * 2] = (double)start;
  ranges[*count * 2 + 1] = (double)end;
  (*count)++;
  return 1;
}

static int32_t scan_ioctl(int fd, uint64_t start, uint64_t end, double *ranges, uint32_t max, double *next) {
  struct scan_region found[512];
  const uint32_t room = sizeof found / sizeof found[0];
  uint32_t count = 0;
  uint64_t at = start;
  while (at < end) {
    struct scan_arg arg;
    memset(&arg, 0, sizeof arg);
    arg.size = sizeof arg;
    arg.start = at;
    arg.end = end;
    arg.vec = (uint64_t)(uintptr_t)found;
    arg.vec_len = room;
    arg.category_inverted = CATEGORY_FILE;
    arg.category_mask = CATEGORY_FILE;
    arg.category_anyof_mask = CATEGORY_PRESENT | CATEGORY_SWAPPED;
    arg.return_mask = CATEGORY_PRESENT | CATEGORY_SWAPPED;
    int n = ioctl(fd, SCAN_IOCTL, &arg);
    if (n < 0) {
      if (errno == EINTR) continue;
      return -errno;
    }
    for (int i = 0; i < n; i++) {
      if (!push(ranges, &count, max, found[i].start, found[i].end)) {
        *next = (double)found[i].start;
        return (int32_t)count;
      }
    }
    /* walk_end may lie short of the end although nothing is left: only a full list means there is more. */
    if ((uint32_t)n < room) break;
    at = found[n - 1].end;
  }
  *next = (double)end;
  return (int32_t)count;
}

static int32_t scan_entries(int fd, uint64_t start, uint64_t end, double *ranges, uint32_t max, double *next) {
  uint64_t entries[4096];
  uint32_t count = 0;
  uint64_t at = start;
  while (at < end) {
    uint64_t pages = (end - at) / PAGE;
    if (pages > sizeof entries / 8) pages = sizeof entries / 8;
    ssize_t got = pread(fd, entries, pages * 8, (off_t)(at / PAGE * 8));
    if (got < 0) {
      if (errno == EINTR) continue;
      return -errno;
    }
    if (got < 8) return -EFAULT; /* past the end of the address space */
    uint64_t n = (uint64_t)got / 8;
    for (uint64_t i = 0; i < n; i++) {
      uint64_t page = at + i * PAGE;
      if ((entries[i] & (ENTRY_PRESENT | ENTRY_SWAPPED)) == 0 || (entries[i] & ENTRY_FILE) != 0) continue;
      if (!push(ranges, &count, max, page, page + PAGE)) {
        *next = (double)page;
        return (int32_t)count;
      }
    }
    at += n * PAGE;
  }
  *next = (double)end;
  return (int32_t)count;
}

int32_t aenv_dirty_ranges(int32_t pagemap_fd, double start, double end, uint32_t flags, double *ranges,
                          uint32_t max_ranges, double *next) {
  if (!(start >= 0 && end >= start && end < MAX_EXACT) || max_ranges == 0) return -EINVAL;
  uint64_t from = (uint64_t)start, to = (uint64_t)end;
  if (from % PAGE != 0 || to % PAGE != 0) return -EINVAL;
  if ((flags & AENV_DIRTY_NO_SCAN) == 0) {
    int32_t count = scan_ioctl(pagemap_fd, from, to, ranges, max_ranges, next);
    if (count != -ENOTTY && count != -EINVAL && count != -EOPNOTSUPP) return count;
  }
  return scan_entries(pagemap_fd, from, to, ranges, max_ranges, next);
}

static int64_t total_length(const double *ranges, uint32_t count, uint32_t capacity) {
  double total = 0;
  for (uint32_t i = 0; i < count; i++) {
    double first = ranges[2 * i], length = ranges[2 * i + 1];
    if (!(first >= 0 && first < MAX_EXACT && length >= 0 && length < MAX_EXACT)) return -EINVAL;
    total += length;
  }
  return total > capacity || total > INT32_MAX ? -EINVAL : (int64_t)total;
}

int32_t aenv_read_process(int32_t pid, const double *ranges, uint32_t count, uint8_t *out, uint32_t capacity) {
  int64_t total = total_length(ranges, count, capacity);
  if (total < 0) return (int32_t)total;
  uint64_t done = 0;
  uint32_t at = 0;
  uint64_t skip = 0; /* bytes of range `at` that are already there */
  while (at < count) {
    struct iovec remote[256];
    unsigned long n = 0;
    uint64_t wanted = 0;
    for (uint32_t i = at; i < count && n < sizeof remote / sizeof remote[0]; i++, n++) {
      uint64_t offset = i == at ? skip : 0;
      remote[n].iov_base = (void *)(uintptr_t)((uint64_t)ranges[2 * i] + offset);
      remote[n].iov_len = (uint64_t)ranges[2 * i + 1] - offset;
      wanted += remote[n].iov_len;
    }
    if (wanted == 0) { /* only empty ranges */
      at += (uint32_t)n;
      skip = 0;
      continue;
    }
    struct iovec local = {.iov_base = out + done, .iov_len = wanted};
    ssize_t got = process_vm_readv(pid, &local, 1, remote, n, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      return -errno;
    }
    if (got == 0) return -EFAULT;
    done += (uint64_t)got;
    uint64_t left = (uint64_t)got + skip;
    while (at < count && left >= (uint64_t)ranges[2 * at + 1]) left -= (uint64_t)ranges[2 * at++ + 1];
    skip = left;
  }
  return (int32_t)done;
}

int32_t aenv_read_file_ranges(int32_t fd, const double *ranges, uint32_t count, uint8_t *out, uint32_t capacity) {
  int64_t total = total_length(ranges, count, capacity);
  if (total < 0) return (int32_t)total;
  uint8_t *to = out;
  for (uint32_t i = 0; i < count; i++) {
    uint64_t offset = (uint64_t)ranges[2 * i], left = (uint64_t)ranges[2 * i + 1];
    while (left > 0) {
      ssize_t got = pread(fd, to, left, (off_t)offset);
      if (got < 0) {
        if (errno == EINTR) continue;
        return -errno;
      }
      if (got == 0) { /* behind the end of the file */
        memset(to, 0, left);
        to += left;
        break;
      }
      to += got;
      offset += (uint64_t)got;
      left -= (uint64_t)got;
    }
  }
  return (int32_t)total;
}

static const uint8_t zero_page[PAGE];

int32_t aenv_compare_pages(const uint8_t *current, const uint8_t *base, uint32_t pages, uint8_t *verdict) {
  for (uint32_t i = 0; i < pages; i++) {
    const uint8_t *page = current + (uint64_t)i * PAGE;
    int zero = memcmp(page, zero_page, PAGE) == 0;
    int same = base == NULL ? zero : memcmp(page, base + (uint64_t)i * PAGE, PAGE) == 0;
    verdict[i] = same ? AENV_PAGE_SAME : zero ? AENV_PAGE_ZERO : AENV_PAGE_DATA;
  }
  return (int32_t)pages;
}
