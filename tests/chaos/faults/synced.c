/* Preloaded into a server: says how long each file was when it was last brought to disk, so that a test can cut off
 * what a power failure would lose. One line "<length> <path>" for each fsync or fdatasync that succeeded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int synced(const char *name, int fd) {
  struct stat before;
  int is_known = fstat(fd, &before) == 0; /* what is written meanwhile may not be on disk */
  int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
  int result = real(fd);
  char link[64], path[4096], line[4200];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  int log = open(getenv("SYNCED_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (result == 0 && is_known && length > 0 && log >= 0) {
    path[length] = 0;
    int size = snprintf(line, sizeof line, "%lld %s\n", (long long)before.st_size, path);
    if (write(log, line, size) != size) abort();
  }
  if (log >= 0) close(log);
  return result;
}

int fsync(int fd) { return synced("fsync", fd); }
int fdatasync(int fd) { return synced("fdatasync", fd); }
