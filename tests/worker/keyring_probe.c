/* keyring_probe [DESCRIPTION SERIAL]: prints the session keyring of this process, and of a key of another process
 * whether it is found by its description, and whether it can be read and changed by its serial number. */

#include <linux/keyctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *able(long result) { return result < 0 ? "no" : "yes"; }

int main(int argc, char **argv) {
    char content[64];
    printf("%ld", syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 0));
    if (argc == 3) {
        long key = atol(argv[2]);
        printf(" found %s", able(syscall(SYS_keyctl, KEYCTL_SEARCH, KEY_SPEC_SESSION_KEYRING, "user", argv[1], 0)));
        printf(" requested %s", able(syscall(SYS_request_key, "user", argv[1], NULL, 0)));
        printf(" read %s", able(syscall(SYS_keyctl, KEYCTL_READ, key, content, sizeof content)));
        printf(" changed %s", able(syscall(SYS_keyctl, KEYCTL_UPDATE, key, "changed", 7)));
    }
    printf("\n");
    return 0;
}
